"""Data: from the `data` section of a spec to rows, with clear errors before any model is loaded. Imports no torch."""
