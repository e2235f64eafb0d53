"""A process's mappings of publications."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.workers.weights.publication.reused_files import KeptMappings


def test_threads_with_different_roots_release_each_others_mappings_unharmed(tmp_path: Path) -> None:
    kept = KeptMappings()

    def write(name: str) -> None:
        root = tmp_path / name
        root.mkdir()
        for number in range(300):
            file = root / str(number % 3)
            if not file.exists() or number % 7 == 0:
                file.unlink(missing_ok=True)
                file.write_bytes(bytes(4096))
            kept.let_go(root)
            memory, _ = kept.writable(file, root)
            memory[:1] = bytes([number % 256])
            assert file.read_bytes()[0] == number % 256

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, name) for name in "abcd"]:
            done.result()
    kept.close()


def test_the_same_file_is_mapped_once(tmp_path: Path) -> None:
    file, kept = tmp_path / "file", KeptMappings()
    file.write_bytes(bytes(4096))
    first, is_new = kept.writable(file, tmp_path)
    again, is_new_again = kept.writable(file, tmp_path)
    assert (is_new, is_new_again) == (True, False)
    assert first is again
    kept.close()
