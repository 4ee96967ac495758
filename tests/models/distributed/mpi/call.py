"""Calls a function on a rank of an MPI job: python call.py FOLDER, for ``run_mpi``."""

import os
import pickle
import sys
from pathlib import Path

folder = Path(sys.argv[1])
function, args = pickle.loads((folder / "call").read_bytes())
value = function(*args)
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
(folder / f"{rank}.value").write_bytes(pickle.dumps(value))
