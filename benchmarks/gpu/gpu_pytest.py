"""Prints test failures as they happen, as a pytest plugin. A run that is killed has then reported its failures so
far."""

import pytest

MOST = 60  # many failures often have one cause
_said = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    global _said
    if report.failed:
        _said += 1
        if _said <= MOST:
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
