"""Values to text: tables, units, styles."""
