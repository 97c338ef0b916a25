from __future__ import annotations

import pytest

from halfwise.errors import DataError, UsageError
from halfwise.workloads.settings import NETWORKS, WORKLOADS, Settings

SETTINGS = Settings(
    workload="image",
    framework="keras",
    backend="jax",
    loop="custom",
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
    defaults = Settings.of("text")
    assert all(getattr(SETTINGS, name) != getattr(defaults, name) for name in SETTINGS.as_dict())
    assert Settings.from_dict(SETTINGS.as_dict()) == SETTINGS


@pytest.mark.parametrize("values", [None, [], {}, {**SETTINGS.as_dict(), "colour": "red"}])
def test_other_settings_are_refused(values: object) -> None:
    with pytest.raises(DataError, match="no settings of a training run"):
        Settings.from_dict(values)


@pytest.mark.parametrize(("workload", "data", "epochs"), [("image", "digits", 20), ("text", "sotu", 10)])
def test_other_data_than_the_built_in_ones_get_fewer_epochs_unless_told(workload: str, data: str, epochs: int) -> None:
    assert Settings.of(workload).data == data
    assert Settings.of(workload).epochs == Settings.of(workload, data=data).epochs == epochs
    assert Settings.of(workload, data="/data").epochs == 5
    assert Settings.of(workload, data="/data", epochs=8).epochs == 8


def test_unknown_networks_are_refused() -> None:
    assert tuple(NETWORKS) == WORKLOADS
    with pytest.raises(UsageError, match="unknown network 'vgg'; choose one of 'convnet', 'small'"):
        Settings.of("image", network="vgg")
    with pytest.raises(UsageError, match="choose one of 'embedding_bag'"):
        Settings.of("text", network="convnet")
