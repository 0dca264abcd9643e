"""What belongs to one chapter alone: its exercises (`exercises_02.py`) and the experiments behind its claims."""
