"""`python -m drafttrain`, and `accelerate launch -m drafttrain`: the command."""

from drafttrain.cli import main

if __name__ == "__main__":
    main()
