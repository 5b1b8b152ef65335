"""A plugin of pytest that writes the outcome of each test to a file at once, so that it outlives a run that is killed.

`pytest -p tests.outcomes --outcomes=FILE` adds lines to FILE for each test: {"test": ..., "outcome": "began"} and then
its outcome, such as "passed". A test that fails after its body, while it is torn down, has a further line.
"""

import json


def pytest_addoption(parser):
    parser.addoption("--outcomes", required=True)


def pytest_configure(config):
    config.pluginmanager.register(Outcomes(config.getoption("outcomes")))


class Outcomes:
    def __init__(self, path):
        self.path = path

    def pytest_runtest_logstart(self, nodeid):
        self.add(nodeid, "began")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.add(report.nodeid, report.outcome)

    def add(self, test, outcome):
        with open(self.path, "a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome}) + "\n")
