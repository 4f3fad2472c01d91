//! The schemas of the methods and of the configuration file, for `schemas/`.

use crate::app::App;
use crate::cli::Cli;
use crate::logging::LogControl;
use crate::methods;
use crate::state::{Config, ConfigFile, OwnersFile, RecordFile};
use crate::upgrade::{Message, VERSION};
use clap::Parser;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Schemas of all methods, by name.
pub fn all() -> io::Result<BTreeMap<String, Value>> {
    let cli = Cli::parse_from(["virtlun-target"]);
    let app = App::new(&cli, Config::default(), LogControl::silent(), None)?;
    let app = Arc::new(app);
    let schemas = methods::table(&app).schemas();
    if let Some(app) = Arc::into_inner(app) {
        app.stop();
    }
    Ok(schemas)
}

/// Schema of the configuration file.
fn config_file() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<ConfigFile>().to_value();
    schema["title"] = json!("Configuration of virtlun-target, as spdk-rpc save_config writes it");
    schema
}

/// Schema of the record in the state directory.
fn record_file() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<RecordFile>().to_value();
    schema["title"] = json!("config.json in the state directory of virtlun-target");
    schema
}

/// Schema of what is recorded beside that.
fn owners_file() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<OwnersFile>().to_value();
    schema["title"] = json!("owners.json in the state directory of virtlun-target");
    schema
}

/// Schema of what two programs say to each other during an upgrade.
fn upgrade_messages() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<Message>().to_value();
    schema["title"] = json!(format!("Messages of an upgrade in place, version {VERSION}"));
    schema
}

/// The files of `schemas/` that this program is the source of, by path in it, with their text.
pub fn files() -> io::Result<BTreeMap<String, String>> {
    let text = |schema: &Value| -> io::Result<String> {
        Ok(format!("{}\n", serde_json::to_string_pretty(schema)?))
    };
    let mut files = BTreeMap::new();
    for (name, schema) in all()? {
        files.insert(format!("rpc/{name}.json"), text(&schema)?);
    }
    files.insert("config/target.json".to_owned(), text(&config_file())?);
    files.insert("config/record.json".to_owned(), text(&record_file())?);
    files.insert("config/owners.json".to_owned(), text(&owners_file())?);
    files.insert("upgrade/messages.json".to_owned(), text(&upgrade_messages())?);
    Ok(files)
}

/// Writes the files under `dir` and removes schemas of methods that are no more.
pub fn write(dir: &Path) -> io::Result<()> {
    let files = files()?;
    fs::create_dir_all(dir.join("rpc"))?;
    fs::create_dir_all(dir.join("config"))?;
    fs::create_dir_all(dir.join("upgrade"))?;
    for entry in fs::read_dir(dir.join("rpc"))? {
        let entry = entry?;
        let name = format!("rpc/{}", entry.file_name().to_string_lossy());
        if name.ends_with(".json") && !files.contains_key(&name) {
            fs::remove_file(entry.path())?;
        }
    }
    files.iter().try_for_each(|(name, text)| fs::write(dir.join(name), text))
}
