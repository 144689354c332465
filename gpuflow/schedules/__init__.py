"""Schedules: templates that are submitted again and again, at the times of a cron expression, by beat."""
