"""``python -m reproduction.benchmarks.calibrate``: the runs; ``report`` beside it prints the table."""

from reproduction.benchmarks.calibrate.run import main

if __name__ == "__main__":
    main()
