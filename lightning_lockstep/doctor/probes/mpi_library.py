"""Which MPI library mpi4py loads: asked without starting MPI, which would need its launcher."""

from __future__ import annotations

import json


def main() -> None:
    """Print vendor and version of the library."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    print(  # noqa: T201
        json.dumps(
            {
                "mpi4py": mpi4py.__version__,
                "vendor": vendor,
                "version": ".".join(map(str, version)),
                "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
            }
        )
    )


if __name__ == "__main__":
    main()
