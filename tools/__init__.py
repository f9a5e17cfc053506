"""Making the embedded model: its text, its training and its figures. Not part of the package."""
