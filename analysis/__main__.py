"""`python -m analysis`: see commands.py."""
from analysis.commands import main

if __name__ == '__main__':
    main()
