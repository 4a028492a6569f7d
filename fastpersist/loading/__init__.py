"""File to object: opened and proven, unpickled, filled in place, inspected."""
