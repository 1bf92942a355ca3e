"""Data on disk, read by streaming: tables, arrays and texts of any size at constant memory."""

from fedcohort.files.source import Block, CsvOptions, Source, Want, open_source

__all__ = ["Block", "CsvOptions", "Source", "Want", "open_source"]
