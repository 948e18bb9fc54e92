"""What a launcher says of a process, and what is missing."""

import pytest

from megatron.errors import UserError
from megatron.parallel.place import Place


def test_nobody_said_anything() -> None:
    assert Place.told({}) is None
    assert Place.told({"RANK": "0", "WORLD_SIZE": "1"}) is None  # left by something else: one process needs no place
    assert Place() == Place(rank=0, world=1, local_rank=0)


def test_what_is_said_is_heard() -> None:
    place = Place(3, 8, 1)
    assert Place.told(place.variables("127.0.0.1", 2345)) == place
    assert place.variables("127.0.0.1", 2345)["MASTER_PORT"] == "2345"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": None}, "RANK is set, but MASTER_PORT is not; start with ./deepy.py train"),
        ({"WORLD_SIZE": None, "LOCAL_RANK": None}, None),
        ({"RANK": "one"}, "RANK, WORLD_SIZE, LOCAL_RANK: must be whole numbers"),
        ({"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8"),
    ],
)
def test_half_of_it_is_refused(changes: dict[str, str | None], message: str | None) -> None:
    variables = {**Place(3, 8, 1).variables("127.0.0.1", 2345), **changes}
    environment = {name: value for name, value in variables.items() if value is not None}
    if message is None:
        assert Place.told(environment) is None
        return
    with pytest.raises(UserError, match=message):
        Place.told(environment)
