"""What the tests of faults share: one seed, and lines with counts that are shown while they run."""

import pytest

from tests.faults.processes import SEED


@pytest.fixture
def tell(capfd):
    """Print a line, with the seed that repeats the test, though output is captured."""

    def tell(line):
        with capfd.disabled():
            print(f"\n{line} (FAULTS_SEED={SEED})", end="", flush=True)

    return tell
