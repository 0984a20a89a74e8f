"""Values as text: tables and units; and the style of figures."""
