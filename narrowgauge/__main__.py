"""`python -m narrowgauge` is the command `narrowgauge`, also if the package is not installed."""

from narrowgauge.harness.cli import main

if __name__ == "__main__":
    main()
