"""Everything that is printed, drawn or written for people: tables, units, pictures, JSON."""
