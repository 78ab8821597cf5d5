"""``python -m reproduction.benchmarks.advice``: the runs; ``score`` beside it prints the table."""

from reproduction.benchmarks.advice.run import main

if __name__ == "__main__":
    main()
