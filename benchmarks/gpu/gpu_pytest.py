"""A plugin of pytest: prints a failure when it happens. A run that is cut short has then said what it found."""

import pytest

MOST = 60  # failures are often of one kind
_said = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    global _said
    if report.failed:
        _said += 1
        if _said <= MOST:
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
