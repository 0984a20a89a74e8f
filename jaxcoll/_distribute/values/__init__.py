"""One value per replica, or one value on all of them, and where they lie."""
