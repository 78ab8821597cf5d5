"""``python -m benchmarks.advice``: the runs; the table is ``python -m benchmarks.advice.score``."""

from benchmarks.advice.run import main

if __name__ == "__main__":
    main()
