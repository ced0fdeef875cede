package image

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Digest names an image: "sha256:" and 64 hexadecimal digits. For a pulled or
// imported image it is the digest of the platform's manifest (of its
// configuration, if an archive has no manifest). For a built image it is the
// digest of its content.
type Digest string

var digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ParseDigest checks a digest.
func ParseDigest(s string) (Digest, error) {
	if !digestPattern.MatchString(s) {
		return "", fmt.Errorf("%q is not a digest: write sha256: and 64 hexadecimal digits", s)
	}
	return Digest(s), nil
}

func newDigest(sum [32]byte) Digest { return Digest("sha256:" + hex.EncodeToString(sum[:])) }

func (d Digest) hex() string { return strings.TrimPrefix(string(d), "sha256:") }

// Short is the form of the digest in lists. It is accepted as a name, too.
func (d Digest) Short() string { return d.hex()[:shortDigest] }

const shortDigest = 12

// Image describes an image. It is kept as JSON beside the image.
type Image struct {
	// Schema is the version of this form.
	Schema   int    `json:"schema"`
	Digest   Digest `json:"digest"`
	Platform string `json:"platform"`
	// Source is the reference it was pulled by, or the origin that it was made
	// from.
	Source  string    `json:"source"`
	Created time.Time `json:"created,omitzero"` // as the image says
	Stored  time.Time `json:"stored"`
	Config  Config    `json:"config"`
	Root    File      `json:"root"`
	// Plain is the root without extended attributes, for engines that cannot
	// read them; nil if the root has no extended attributes.
	Plain *File `json:"plain,omitempty"`
	// Unpacked is the size of all files in it.
	Unpacked int64 `json:"unpacked"`
	// Capabilities are the programs that have file capabilities: they lose them
	// on engines that use the plain root.
	Capabilities []string `json:"capabilities,omitempty"`
	// DroppedXattrs are extended attributes that were left out.
	DroppedXattrs []string `json:"droppedXattrs,omitempty"`
	// BuildKey is the hash of all inputs of a built image.
	BuildKey string `json:"buildKey,omitempty"`
	// Names are the local names at the time of the lookup.
	Names []string `json:"names,omitempty"`
}

// imageSchema is the version of image.json.
const imageSchema = 1

// File is an EROFS file of an image.
type File struct {
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Config says how an image's programs are to be run.
type Config struct {
	Env          []string          `json:"env,omitempty"` // NAME=VALUE
	User         string            `json:"user,omitempty"`
	WorkingDir   string            `json:"workingDir,omitempty"`
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	ExposedPorts []string          `json:"exposedPorts,omitempty"` // such as 80/tcp
	Labels       map[string]string `json:"labels,omitempty"`
	StopSignal   string            `json:"stopSignal,omitempty"`
}

// Command is the argv to run with args, which may be empty. As with docker run,
// args replace Cmd and follow the entrypoint.
func (c Config) Command(args []string) []string {
	if len(args) == 0 {
		args = c.Cmd
	}
	return slices.Concat(c.Entrypoint, args)
}

// Environ is the image's environment with changes of NAME=VALUE over it.
func (c Config) Environ(changes []string) []string {
	changed := map[string]bool{}
	for _, e := range changes {
		name, _, _ := strings.Cut(e, "=")
		changed[name] = true
	}
	var out []string
	for _, e := range c.Env {
		if name, _, _ := strings.Cut(e, "="); !changed[name] {
			out = append(out, e)
		}
	}
	return append(out, changes...)
}

// configOf takes the fields in use from an image's configuration, and checks
// them: its author is not trusted.
func configOf(c v1.Config) (Config, error) {
	out := Config{
		Env: c.Env, User: c.User, WorkingDir: c.WorkingDir,
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels, StopSignal: c.StopSignal,
	}
	for port := range c.ExposedPorts {
		out.ExposedPorts = append(out.ExposedPorts, port)
	}
	slices.Sort(out.ExposedPorts)
	return out, out.validate()
}

func (c Config) validate() error {
	for _, e := range c.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return fmt.Errorf("the image's configuration is damaged: %q in its environment is not NAME=VALUE", e)
		}
	}
	for _, s := range slices.Concat(c.Env, c.Entrypoint, c.Cmd, c.ExposedPorts, []string{c.User, c.WorkingDir, c.StopSignal}) {
		if strings.IndexByte(s, 0) >= 0 {
			return errors.New("the image's configuration is damaged: it holds a zero byte")
		}
	}
	if c.WorkingDir != "" && !path.IsAbs(c.WorkingDir) {
		return fmt.Errorf("the image's configuration is damaged: its working folder %q is not absolute", c.WorkingDir)
	}
	return nil
}

// decodeImage reads image.json.
func decodeImage(b []byte, want Digest) (*Image, error) {
	var img Image
	if err := json.Unmarshal(b, &img); err != nil {
		return nil, err
	}
	switch {
	case img.Schema > imageSchema:
		return nil, fmt.Errorf("it has schema %d, of a newer AgentRun; this one knows %d", img.Schema, imageSchema)
	case img.Schema != imageSchema:
		return nil, fmt.Errorf("it has schema %d", img.Schema)
	case img.Digest != want:
		return nil, fmt.Errorf("it describes %q", img.Digest)
	}
	return &img, img.Config.validate()
}
