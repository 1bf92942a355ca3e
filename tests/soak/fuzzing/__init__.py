"""Every parser of fedcohort, with examples of what it reads and the ways to damage them."""

from __future__ import annotations

from . import data_files, messages, registry, saved_state, settings

TARGETS = {
    target.name: target
    for target in (
        saved_state.Sketch,
        saved_state.Checkpoint,
        saved_state.Budget,
        data_files.Idx,
        data_files.Npy,
        data_files.Npz,
        data_files.Arrow,
        data_files.Feather,
        data_files.Parquet,
        data_files.Csv,
        data_files.Cifar,
        data_files.Femnist,
        settings.Toml,
        settings.SketchSpec,
        settings.Trace,
        messages.FlowerReading,
        messages.FlowerRequest,
        messages.FlowerUpdate,
        settings.Policy,
        saved_state.Folder,
        registry.RegistryFolder,
    )
}
