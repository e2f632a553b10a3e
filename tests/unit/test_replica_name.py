"""Names that replicas know adapters by."""

import pytest

from registry.replica_name import ReplicaName, parse_replica_name

DIGEST = "0123456789abcdef" * 4


def test_round_trip() -> None:
    name = ReplicaName("tenant-4f1c", "support.eu", "tone_v2", DIGEST)
    assert str(name) == f"tenant-4f1c/support.eu/tone_v2@{DIGEST}"
    assert parse_replica_name(str(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "base", f"a/b@{DIGEST}", f"a/b/c/d@{DIGEST}", f"a/../c@{DIGEST}", f"../b/c@{DIGEST}", f"a//c@{DIGEST}", f"/a/b/c@{DIGEST}",
        f"a/b/.c@{DIGEST}", f"a/b/c@{DIGEST[:-1]}", f"a/b/c@{DIGEST}0", f"a/b/c@{DIGEST.upper()}", f"a/b/c@{DIGEST}\n",
        f"a/b/c\\d@{DIGEST}", f"a/b/{'c' * 200}@{DIGEST}", f"a/b/c\x00@{DIGEST}", f"a/b/ｃ@{DIGEST}",
    ],
)  # fmt: skip
def test_other_forms_are_not_names(name: str) -> None:
    assert parse_replica_name(name) is None


def test_parts_that_make_no_name_are_refused() -> None:
    with pytest.raises(ValueError, match="segments"):
        ReplicaName("a", "..", "c", DIGEST)
