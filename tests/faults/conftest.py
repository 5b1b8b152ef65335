"""What the tests of faults share: they tell how often each fault was made, and the seed that makes them again."""

import pytest

from tests.faults.processes import SEED


@pytest.fixture
def tell(record_property):
    """Say a line at the end of all tests. (Printing would not do: tests may run in processes of their own.)"""
    return lambda line: record_property("told", line)


def pytest_terminal_summary(terminalreporter):
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "when")]
    told = [
        text for report in reports if report.when == "call" for name, text in report.user_properties if name == "told"
    ]
    if told:
        terminalreporter.section(f"FAULTS_SEED={SEED}")
        for line in told:
            terminalreporter.line(line)
