"""Results for people: tables, curves and pages."""
