"""The tutorials, and what they share: `kit` (settings, data), `helpers`, `checks`."""
