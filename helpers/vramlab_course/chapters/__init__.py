"""Helpers of single chapters: models, recipes and runs that a notebook, its exercises or its claims share."""
