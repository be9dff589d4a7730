"""Threads that decode images side by side, each of which keeps to one core."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_changing = threading.Lock()


def decoder_threads(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads run torch's operators on themselves alone."""
    return ThreadPoolExecutor(threads, "mergestream-decoding", _use_one_core)


def _use_one_core() -> None:
    """Else every thread gets helpers, as many as there are cores, for each copy of an image: they stand in each other's
    way, and the fewer cores are free the longer each waits for its own."""
    with _changing:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread, and of threads to come
        restored = threading.Thread(target=torch.set_num_threads, args=(before,))
        restored.start()
        restored.join()
