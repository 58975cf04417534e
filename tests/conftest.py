"""One torch thread per process, as everywhere in the project; no network attempts by Flower; caches of their own."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "HETEROFLEET_HOME" not in os.environ:
    os.environ["HETEROFLEET_HOME"] = tempfile.mkdtemp(prefix="heterofleet-tests-")
    atexit.register(shutil.rmtree, os.environ["HETEROFLEET_HOME"], ignore_errors=True)

import torch

torch.set_num_threads(1)
