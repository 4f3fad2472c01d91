//! `schemas/` and the code say the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[test]
fn the_schemas_in_the_repository_are_those_of_the_code() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../schemas");
    let files = target::schemas::files().unwrap();
    let mut wrong = Vec::new();
    for (name, text) in &files {
        match fs::read_to_string(dir.join(name)) {
            Ok(there) if there == *text => {}
            Ok(_) => wrong.push(format!("{name} differs")),
            Err(e) => wrong.push(format!("{name}: {e}")),
        }
    }
    let there: BTreeSet<_> = fs::read_dir(dir.join("rpc"))
        .into_iter()
        .flatten()
        .map(|entry| format!("rpc/{}", entry.unwrap().file_name().to_string_lossy()))
        .filter(|name| name.ends_with(".json"))
        .collect();
    wrong.extend(
        there.iter().filter(|n| !files.contains_key(*n)).map(|n| format!("{n} is of no method")),
    );
    assert!(
        wrong.is_empty(),
        "schemas/ and the code disagree:\n  {}\nIf the code is right, write them anew, from the \
         top folder:\n  cargo run --manifest-path pydataplane/Cargo.toml -p target -- \
         --dump-schemas schemas\nand commit them.",
        wrong.join("\n  ")
    );
}

#[test]
fn every_method_and_every_parameter_is_described() {
    for (name, schema) in target::schemas::all().unwrap() {
        assert!(schema["description"].as_str().is_some_and(|d| d.ends_with('.')), "{name}");
        assert_eq!(schema["params"]["additionalProperties"], false, "{name} takes anything");
        let params = schema["params"]["properties"].as_object().cloned().unwrap_or_default();
        for (param, schema) in params {
            let described = schema["description"].as_str().is_some_and(|d| !d.is_empty());
            assert!(described, "{name}: {param} is not described");
        }
    }
}
