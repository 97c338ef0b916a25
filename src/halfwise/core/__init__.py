"""The framework-neutral core: numpy and ml_dtypes only."""
