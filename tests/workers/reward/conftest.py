import pytest

from tests.workers.reward.pools import BEHAVIOURS


@pytest.fixture(scope="session")
def behaviours(tmp_path_factory):
    """A file of rewards; `{behaviours}:plain` is one."""
    path = tmp_path_factory.mktemp("rewards") / "behaviours.py"
    path.write_text(BEHAVIOURS)
    return str(path)
