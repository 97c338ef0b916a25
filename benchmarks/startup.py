"""How long importing and `--help` take.

Claims: `import halfwise` within 50 ms of bare Python; `halfwise --help` under 0.5 s.

    python benchmarks/startup.py [--json] [--rounds 15]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial

from _harness import emit, interleave, medians, table

COMMANDS = {
    "bare Python": ["-c", "pass"],
    "import halfwise": ["-c", "import halfwise"],
    "halfwise --help": ["-m", "halfwise", "--help"],
    "import torch": ["-c", "import torch"],
    "import halfwise.torch": ["-c", "import halfwise.torch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    runs = {
        name: partial(subprocess.run, [sys.executable, *command], check=True, capture_output=True)
        for name, command in COMMANDS.items()
    }
    seconds = medians(interleave(runs, arguments.rounds))
    bare = seconds["bare Python"]
    rows = [(name, f"{value * 1e3:.0f}", f"{(value - bare) * 1e3:+.0f}") for name, value in seconds.items()]
    emit(table(("command", "ms", "over bare Python"), rows), {"seconds": seconds}, as_json=arguments.json)


if __name__ == "__main__":
    main()
