"""Attempts at the tasks of an environment: played, limited, and written as rows."""
