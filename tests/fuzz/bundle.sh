#!/usr/bin/env bash
# Puts the fuzz targets that are built (run.sh NAME build), their corpora, and the libraries that they need into a folder, for
# campaign.py on a machine that has none of them but a C library as new as this one's and Python: bundle.sh OUT
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/../.."
folder=${WINNOW_FUZZ_DIR:-build/fuzz}
mkdir -p "$out/lib" "$out/corpus"
cp tests/fuzz/campaign.py "$out"
for program in "$folder"/*/fuzz; do
  name=$(basename "$(dirname "$program")")
  mkdir -p "$out/$name" "$out/corpus/$name"
  cp "tests/fuzz/corpus/$name"/* "$out/corpus/$name"
  find "$folder/$name/found" -type f -size -4k -exec cp -t "$out/corpus/$name" {} +
  strip -o "$out/$name/fuzz" "$program"
  ln -sfn ../lib "$out/$name/lib"  # where the program looks
  if ldd "$program" | grep 'not found' >&2; then exit 1; fi
  ldd "$program" | awk '$2 == "=>" { print $3 }' | grep -Ev '/lib(c|m|dl|rt|pthread|resolv)\.so' | while read -r library; do
    [ -e "$out/lib/$(basename "$library")" ] || strip --strip-unneeded -o "$out/lib/$(basename "$library")" "$library"
  done
done
echo "$out: $(du -sh "$out" | cut -f1), $(find "$out" -name fuzz -type f | wc -l) targets"
