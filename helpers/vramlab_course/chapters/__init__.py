"""Models, recipes and runs that a chapter's notebook shares with its exercises or claims."""
