"""What a call holds, by the allocator's own records: the same in every run."""

from torch.profiler import ProfilerActivity, profile


def peak(call):
    """The most bytes that are held at a time while it runs, its results included, but not what a CPU's products take
    for themselves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        results = call()
    events = record.profiler.kineto_results.events()
    products = [(event.start_ns(), event.end_ns()) for event in events if event.name() == "aten::mm"]
    held = most = 0
    for event in events:
        if event.name() == "[memory]" and not any(a <= event.start_ns() <= b for a, b in products):
            held += event.nbytes()
            most = max(most, held)
    del results
    return most
