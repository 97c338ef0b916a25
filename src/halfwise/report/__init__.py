"""Screens: records and reports drawn with rich. They read data, never a framework."""
