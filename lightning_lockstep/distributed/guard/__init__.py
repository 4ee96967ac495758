"""What ranks call, compared between them: one description and one report for every backend."""
