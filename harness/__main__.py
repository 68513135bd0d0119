"""`python -m harness` is `narrowgauge`, also where the package is not installed."""

from harness.cli import main

if __name__ == "__main__":
    main()
