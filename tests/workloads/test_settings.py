from __future__ import annotations

import pytest
import torch

from halfwise.errors import DataError
from halfwise.workloads.settings import ImageSettings, describe_environment, environment_changes

SETTINGS = ImageSettings(
    policy="mixed_float16",
    data="/data",
    network="small",
    epochs=3,
    batch_size=7,
    learning_rate=0.5,
    seed=9,
    limit=11,
    checkpoint_every=13,
)


def test_settings_round_trip() -> None:
    defaults = ImageSettings()
    assert all(getattr(SETTINGS, name) != getattr(defaults, name) for name in SETTINGS.as_dict())
    assert ImageSettings.from_dict(SETTINGS.as_dict()) == SETTINGS


@pytest.mark.parametrize("values", [None, [], {}, {**SETTINGS.as_dict(), "colour": "red"}])
def test_other_settings_are_refused(values: object) -> None:
    with pytest.raises(DataError, match="no settings of an image training run"):
        ImageSettings.from_dict(values)


def test_data_other_than_the_digits_get_fewer_epochs_unless_told() -> None:
    assert ImageSettings.of().epochs == ImageSettings.of(data="digits").epochs == 20
    assert ImageSettings.of(data="/data").epochs == 5
    assert ImageSettings.of(data="/data", epochs=8).epochs == 8


def test_environment_changes_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    now = describe_environment(SETTINGS, model=model, device=torch.device("cpu"), data={"name": "d"})
    assert now["modules"] == {"": "Sequential", "0": "Linear"}
    assert now["threads"] == torch.get_num_threads()
    assert environment_changes(now, now) == []
    before = {**now, "threads": 99, "versions": {**now["versions"], "torch": "1.0"}, "cpus": -1}
    assert environment_changes(before, now) == [
        f"threads: 99 before, {now['threads']} now",
        f"torch: 1.0 before, {torch.__version__} now",
    ]
    assert "threads: None before" in environment_changes({}, now)[1]
