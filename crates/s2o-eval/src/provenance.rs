//! [`Provenance`]: origin of measured rows.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// Origin of a row: its last columns in a CSV file. A file may lack some of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Provenance {
    /// The day, in the form `2026-01-31`.
    pub date: String,
    /// The project's commit.
    pub commit: String,
    /// The GPU, or the CPU and its threads.
    pub device: String,
    /// The version of a GPU's driver.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// The file of tensors, or the model and its prompt.
    pub source: String,
    /// The command line.
    pub command: String,
}

impl Provenance {
    /// Provenance of measurements made today on `device` by `command` at the checked-out commit. A binary that runs
    /// outside its repository takes the commit from the environment variable `S2O_COMMIT`.
    pub fn here(device: String, command: String) -> Self {
        let commit = std::env::var("S2O_COMMIT")
            .unwrap_or_else(|_| first_line_of("git", &["describe", "--always", "--dirty", "--abbrev=10"]));
        let date = first_line_of("date", &["-u", "+%Y-%m-%d"]);
        Self { date, commit, device, command, ..Self::default() }
    }

    /// The same provenance with `source` as the description of the tensors, its lines joined.
    #[must_use]
    pub fn with_source(self, source: &str) -> Self {
        let lines = source.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        Self { source: lines.collect::<Vec<_>>().join("; "), ..self }
    }
}

/// The CPU and the number of threads in Rayon's pool.
pub fn cpu() -> String {
    let model = proc_entry("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{model}, {} threads", rayon::current_num_threads())
}

/// The first value of a key in a file of `key: value` lines; `None` if there is no such file.
pub fn proc_entry(path: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
    })
}

/// First line of a program's output; empty if the program cannot be run.
pub fn first_line_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().ok();
    let text = output.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_as_they_are_written() {
        let here = Provenance::here(cpu(), "evaluate run".to_owned()).with_source("a  model\nits prompt");
        assert_eq!(here.source, "a model; its prompt");
        assert!(here.date.len() == 10 && here.device.ends_with(" threads"), "{here:?}");
        let columns = ["date,commit,device,source,command", "date,commit,device,driver,source,command"];
        for (driver, columns) in ["", "580"].into_iter().zip(columns) {
            let row = Provenance { driver: driver.to_owned(), ..here.clone() };
            let mut writer = csv::Writer::from_writer(Vec::new());
            writer.serialize(&row).unwrap();
            let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
            assert!(text.starts_with(&format!("{columns}\n")), "{text}");
            let read = csv::Reader::from_reader(text.as_bytes()).deserialize::<Provenance>().next();
            assert_eq!(read.unwrap().unwrap(), row);
        }
    }
}
