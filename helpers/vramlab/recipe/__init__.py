"""What to train and how: the recipe, its options, and the shapes of models."""
