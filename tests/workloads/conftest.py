"""The trainings in Keras run in a process for each backend, as the tests of the Keras adapter do."""

from __future__ import annotations

import os

collect_ignore = [] if "KERAS_BACKEND" in os.environ else ["keras"]
