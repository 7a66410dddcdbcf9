"""What everything stands on: errors, argument records, validation. Imports nothing of the package."""
