"""Work for all cores."""
import multiprocessing
import signal


def spread(work, parts, workers, chunksize=1):
    """map(work, parts) by so many processes, in order; Ctrl-C is for the parent alone."""
    if workers == 1:
        yield from map(work, parts)
        return
    with multiprocessing.Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap(work, parts, chunksize)
