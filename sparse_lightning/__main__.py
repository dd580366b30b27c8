"""`python -m sparse_lightning` is the command line."""

from sparse_lightning.app.cli import main

if __name__ == "__main__":
    main()
