"""``python -m benchmarks.calibrate``: the runs; the table is ``python -m benchmarks.calibrate.report``."""

from benchmarks.calibrate.run import main

if __name__ == "__main__":
    main()
