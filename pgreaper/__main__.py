"""``python -m pgreaper``."""

from pgreaper.cli import run

if __name__ == "__main__":
    run()
