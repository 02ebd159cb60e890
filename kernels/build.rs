//! Compiles `cuda/` with nvcc if the feature `cuda` is on: sm_90a machine code, and PTX of compute_80 for every other
//! GPU. A table of the results is included by `src/modules.rs`; a `.log` of each has what ptxas says about registers and
//! spills. With `S2O_KERNELS_CACHE`, a folder, builds of the same sources by the same nvcc share the results: workspaces and
//! features otherwise compile them again, for minutes.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

const CACHE: &str = "S2O_KERNELS_CACHE";

/// The first version with wgmma, TMA and `__grid_constant__` parameters of this size.
const OLDEST_NVCC: (u32, u32) = (12, 0);

const HOW_TO: &str = "The feature `cuda` needs NVIDIA's compiler: install the CUDA toolkit, and set NVCC to its nvcc \
or CUDA_HOME to its root if neither PATH nor /usr/local/cuda has it. On Linux, `eval \"$(scripts/cuda-toolkit.sh)\"` \
in a checkout of candle-s2o installs a toolkit; this needs no GPU.";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", CACHE] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(message) = compile_all() {
        eprintln!("s2o-kernels: {message}");
        std::process::exit(1);
    }
}

fn compile_all() -> Result<(), String> {
    let nvcc = find_nvcc()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let portable = sources(Path::new("cuda"))?;
    let mut jobs = Vec::new();
    for target in &TARGETS {
        for source in portable.iter().cloned().chain(sources(&Path::new("cuda").join(target.folder))?) {
            let stem = source.file_stem().expect("sources have names").to_string_lossy().into_owned();
            let output = out.join(format!("{}_{stem}.{}", target.folder, target.extension));
            jobs.push(Job { target, stem, source, output });
        }
    }
    let cache = env::var_os(CACHE).map(|folder| Cache::new(folder.into(), &nvcc)).transpose()?;
    run(&nvcc, &jobs, cache.as_ref())?;
    fs::write(out.join("modules.rs"), table(&jobs)?).map_err(|error| format!("modules.rs: {error}"))
}

struct Target {
    /// Name of its table in `modules.rs`.
    table: &'static str,
    folder: &'static str,
    extension: &'static str,
    nvcc_flags: &'static [&'static str],
    /// What a kernel's name follows in the code: one section per kernel in a cubin, one entry in PTX.
    mark: &'static [u8],
    /// The variant of `Code` and the macro that embeds it.
    embed: [&'static str; 2],
}

const TARGETS: [Target; 2] = [
    Target {
        table: "SM90A",
        folder: "sm90",
        extension: "cubin",
        nvcc_flags: &["-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"],
        mark: b".text.",
        embed: ["Cubin", "include_bytes"],
    },
    Target {
        table: "SM80",
        folder: "sm80",
        extension: "ptx",
        nvcc_flags: &["-gencode", "arch=compute_80,code=compute_80", "-ptx"],
        mark: b".entry ",
        embed: ["Ptx", "include_str"],
    },
];

struct Job {
    target: &'static Target,
    stem: String,
    source: PathBuf,
    output: PathBuf,
}

/// The .cu files of a folder, in order; `ladder.cu` only with the feature `ladder`.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error| format!("{}: {error}", folder.display());
    let mut sources = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let left_out = path.ends_with("ladder.cu") && env::var_os("CARGO_FEATURE_LADDER").is_none();
        if path.extension().is_some_and(|extension| extension == "cu") && !left_out {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

/// Runs the jobs in parallel, as many at a time as cargo allows.
fn run(nvcc: &Path, jobs: &[Job], cache: Option<&Cache>) -> Result<(), String> {
    let workers = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1usize).min(jobs.len());
    let queue = Mutex::new(jobs.iter().collect::<VecDeque<_>>());
    let next = || queue.lock().expect("no worker panics").pop_front();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(job) = next() {
                        compile(nvcc, job, cache)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })
}

/// Results of earlier builds.
struct Cache {
    folder: PathBuf,
    /// Of nvcc's version and all sources: any of them may include any header.
    hash: u64,
}

impl Cache {
    fn new(folder: PathBuf, nvcc: &Path) -> Result<Self, String> {
        fs::create_dir_all(&folder).map_err(|error| format!("{CACHE}={}: {error}", folder.display()))?;
        let mut hasher = DefaultHasher::new();
        version_text(nvcc).hash(&mut hasher);
        let mut folders = vec![PathBuf::from("cuda")];
        while let Some(folder) = folders.pop() {
            let failed = |error| format!("{}: {error}", folder.display());
            let mut paths = Vec::new();
            for entry in fs::read_dir(&folder).map_err(failed)? {
                paths.push(entry.map_err(failed)?.path());
            }
            paths.sort();
            for path in paths {
                if path.is_dir() {
                    folders.push(path);
                } else {
                    (&path, fs::read(&path).map_err(failed)?).hash(&mut hasher);
                }
            }
        }
        Ok(Self { folder, hash: hasher.finish() })
    }

    /// The result of a job, which need not exist.
    fn path(&self, job: &Job) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        (self.hash, &job.source, job.target.nvcc_flags, FLAGS).hash(&mut hasher);
        self.folder.join(format!("{}_{:016x}.{}", job.stem, hasher.finish(), job.target.extension))
    }
}

const FLAGS: [&str; 2] = ["-std=c++17", "-O3"];

/// Compiles a source, or copies the result of an earlier build.
fn compile(nvcc: &Path, job: &Job, cache: Option<&Cache>) -> Result<(), String> {
    let Some(cache) = cache else { return run_nvcc(nvcc, job) };
    let kept = cache.path(job);
    let files = [(log_of(&job.output), log_of(&kept)), (job.output.clone(), kept)];
    if files.iter().all(|(output, kept)| fs::copy(kept, output).is_ok()) {
        return Ok(());
    }
    run_nvcc(nvcc, job)?;
    for (output, kept) in &files {
        // A build that runs at the same time sees a whole file or none.
        let partial = kept.with_extension(std::process::id().to_string());
        fs::copy(output, &partial)
            .and_then(|_| fs::rename(&partial, kept))
            .map_err(|error| format!("{CACHE}: {}: {error}", kept.display()))?;
    }
    Ok(())
}

fn log_of(output: &Path) -> PathBuf {
    output.with_extension("log")
}

fn run_nvcc(nvcc: &Path, job: &Job) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(FLAGS).args(job.target.nvcc_flags).arg("-o").arg(&job.output).arg(&job.source);
    let output = command.output().map_err(|error| format!("{}: {error}. {HOW_TO}", nvcc.display()))?;
    let messages = [output.stdout, output.stderr].map(|stream| String::from_utf8_lossy(&stream).into_owned()).concat();
    if !output.status.success() {
        return Err(format!("{command:?} failed ({})\n{messages}", output.status));
    }
    let log = log_of(&job.output);
    fs::write(&log, messages).map_err(|error| format!("{}: {error}", log.display()))
}

/// The table of modules, with the kernels found in each.
fn table(jobs: &[Job]) -> Result<String, String> {
    let mut text = String::new();
    for Target { table, mark, embed: [code, include], .. } in &TARGETS {
        text += &format!("static {table}: &[Module] = &[\n");
        for Job { stem, output, .. } in jobs.iter().filter(|job| job.target.table == *table) {
            let bytes = fs::read(output).map_err(|error| format!("{}: {error}", output.display()))?;
            let kernels = names_after(&bytes, mark);
            let code = format!("Code::{code}({include}!({output:?}))");
            text += &format!("    Module {{ name: {stem:?}, kernels: &{kernels:?}, code: {code} }},\n");
        }
        text += "];\n";
    }
    Ok(text)
}

/// The identifiers of kernels that follow `mark` in code.
fn names_after(code: &[u8], mark: &[u8]) -> Vec<String> {
    let starts = (0..code.len()).filter(|&i| code[i..].starts_with(mark)).map(|i| i + mark.len());
    let mut names: Vec<String> = starts
        .map(|start| {
            let name = code[start..].iter().take_while(|c| c.is_ascii_alphanumeric() || **c == b'_');
            name.map(|&c| char::from(c)).collect()
        })
        .filter(|name: &String| name.starts_with("s2o_"))
        .collect();
    names.sort();
    names.dedup();
    names
}

/// Finds nvcc from NVCC, the toolkit variables, PATH or the default folder, and checks its version.
fn find_nvcc() -> Result<PathBuf, String> {
    let mut places: Vec<PathBuf> = env::var_os("NVCC").map(PathBuf::from).into_iter().collect();
    let roots = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter().filter_map(env::var_os);
    places.extend(roots.map(|root| Path::new(&root).join("bin/nvcc")));
    places.push("nvcc".into());
    places.push("/usr/local/cuda/bin/nvcc".into());
    for nvcc in places {
        let Some(text) = version_text(&nvcc) else { continue };
        let version = parse_version(&text)
            .ok_or_else(|| format!("{}: expected a version from --version, got {text:?}. {HOW_TO}", nvcc.display()))?;
        if version < OLDEST_NVCC {
            let ((major, minor), (oldest, oldest_minor)) = (version, OLDEST_NVCC);
            return Err(format!(
                "{}: expected CUDA {oldest}.{oldest_minor} or newer (wgmma and TMA), got {major}.{minor}. {HOW_TO}",
                nvcc.display()
            ));
        }
        return Ok(nvcc);
    }
    Err(format!("expected nvcc, found none. {HOW_TO}"))
}

/// What `nvcc --version` prints, or `None` if it does not run.
fn version_text(nvcc: &Path) -> Option<String> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses "Cuda compilation tools, release 13.0, V13.0.88".
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let release = text.split("release ").nth(1)?;
    let (major, minor) = release.split(',').next()?.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
