"""The checks of the exercises. You may read them, and need not."""
